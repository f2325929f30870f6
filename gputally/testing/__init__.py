"""Suites and fakes with which a plug-in proves itself, also outside this repository. They need pytest.

    from gputally.testing.channels import ChannelSuite

A module stands for a seam. It has a class of tests, from which a plug-in's test module derives its own, and says there
what a fake must offer."""
