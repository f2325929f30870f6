INSERT INTO hole SELECT * FROM incoming
