INSERT INTO piece SELECT * FROM incoming
