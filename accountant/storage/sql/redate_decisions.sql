-- Dates decisions from after $limit to $now.
UPDATE decision SET at_ms = least(at_ms, $now), received_ms = least(received_ms, $now) WHERE greatest(at_ms, received_ms) > $limit
