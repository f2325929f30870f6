INSERT INTO tenure SELECT * FROM incoming
