"""The demo: the simulator's cluster with the real agent, accountant and fairshare code on a virtual clock."""
