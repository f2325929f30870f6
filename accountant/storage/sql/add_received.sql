INSERT INTO received SELECT * FROM incoming
