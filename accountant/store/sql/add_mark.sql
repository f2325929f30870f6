INSERT INTO mark SELECT * FROM incoming
