"""Reports and notices that reach people by themselves: as files, by mail, in a chat.

`orders` is what an operator wants, `occasions` what is due by it, `letters` what it says in each medium, `carriers` how
it travels, `attempts` what became of it; `dispatch` puts them together. Nothing is sent twice: an attempt whose end is
not known is not repeated, it is shown to a person.
"""
