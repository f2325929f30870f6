-- Adds the output of fold.sql to the sums of every width. From then on the hours in `incoming` (at_ms) are folded.
INSERT INTO quarter FROM folded;
INSERT INTO hour
SELECT at_ms - at_ms % 3600000 AS over, gpu, device, payer, {sums_of_cells}
FROM folded GROUP BY ALL ORDER BY over, gpu, device, payer;
INSERT INTO hour_of_all
SELECT at_ms - at_ms % 3600000 AS over, payer, {sums_of_cells}
FROM folded GROUP BY ALL ORDER BY over, payer;
DELETE FROM unfolded WHERE at_ms IN (SELECT at_ms FROM incoming);
DROP TABLE folded
