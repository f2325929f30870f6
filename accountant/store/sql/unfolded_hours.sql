SELECT DISTINCT at_ms - at_ms % 3600000 FROM recent
