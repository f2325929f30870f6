"""What was planned reaches the cluster: carried out, taken over from somebody else, given back."""
