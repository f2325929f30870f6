-- incoming: reports of epochs. They get the numbers after the last one.
INSERT INTO progress
SELECT *, (SELECT coalesce(max(number), 0) FROM progress) + row_number() OVER () FROM incoming
