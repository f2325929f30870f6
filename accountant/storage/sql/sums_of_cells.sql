-- The sums of the figures in cells.sql.
sum(busy_us)::BIGINT AS busy_us, sum(idle_us)::BIGINT AS idle_us, sum(unknown_us)::BIGINT AS unknown_us,
sum(unheld_us)::BIGINT AS unheld_us, sum(down_us)::BIGINT AS down_us, sum(borrowed_us)::BIGINT AS borrowed_us,
sum(unattributed_us)::BIGINT AS unattributed_us, sum(memory_mib_s)::BIGINT AS memory_mib_s,
sum(energy_uj)::BIGINT AS energy_uj, sum(energy_blind_us)::BIGINT AS energy_blind_us,
sum(memory_blind_us)::BIGINT AS memory_blind_us, sum(sm_active_us)::BIGINT AS sm_active_us,
sum(sm_blind_us)::BIGINT AS sm_blind_us, sum(tensor_active_us)::BIGINT AS tensor_active_us,
sum(tensor_blind_us)::BIGINT AS tensor_blind_us
