-- Removes all sums of some hours, of every width. incoming: at_ms.
DELETE FROM hour WHERE at_ms IN (SELECT at_ms FROM incoming);
DELETE FROM hour_of_all WHERE at_ms IN (SELECT at_ms FROM incoming);
DELETE FROM quarter WHERE at_ms - at_ms % 3600000 IN (SELECT at_ms FROM incoming)
