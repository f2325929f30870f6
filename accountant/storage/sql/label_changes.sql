-- The instants between $low and $high at which an exported label of some pod changed.
SELECT DISTINCT since_ms FROM exported_label WHERE changed AND since_ms > $low AND since_ms < $high ORDER BY since_ms
