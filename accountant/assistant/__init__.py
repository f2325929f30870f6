"""Answers the questions of an assistant (Model Context Protocol) with the accountant's own API."""
