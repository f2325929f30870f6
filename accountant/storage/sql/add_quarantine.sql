INSERT INTO quarantine SELECT * FROM incoming
