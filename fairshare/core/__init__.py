"""Defines the kinds, quantities, pods and field ownership that every package of the controller uses."""
