"""Pages for people: rendered here, readable without scripts, on a phone and on paper."""
