"""Defines the kinds, quantities, pods and field ownership that every room of the controller uses."""
