INSERT INTO past SELECT * FROM incoming
