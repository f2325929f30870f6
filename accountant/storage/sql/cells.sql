-- The figures of a row or a sum (accountant.core.gpu_time_accounts.CELLS).
busy_us, idle_us, unknown_us, unheld_us, down_us, borrowed_us, unattributed_us, memory_mib_s, energy_uj,
energy_blind_us, memory_blind_us, sm_active_us, sm_blind_us, tensor_active_us, tensor_blind_us
