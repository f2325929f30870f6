"""`gputally doctor`: what usually goes wrong, looked for; every finding with its figures and what mends it.

Facts come from thin collectors (`sources`, `host`, `permissions`, `queues`), findings from pure modules, one per
subject; `checks` pairs them. A check that cannot be made says why and leaves the others alone. Nothing is changed
anywhere.
"""
