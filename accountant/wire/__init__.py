"""Defines the models that the accountant publishes: policies, usage, decisions and API answers."""
