-- Every sum of the hours in `incoming` (tag, gpu, at_ms) of one GPU each, at whatever width.
DELETE FROM hour USING incoming i WHERE hour.gpu = i.gpu AND hour.at_ms = i.at_ms;
DELETE FROM quarter USING incoming i WHERE quarter.gpu = i.gpu AND quarter.at_ms - quarter.at_ms % 3600000 = i.at_ms;
DELETE FROM recent USING incoming i WHERE recent.gpu = i.gpu AND recent.at_ms - recent.at_ms % 3600000 = i.at_ms
