MERGE INTO mark USING incoming i ON mark.stream = i.stream
WHEN MATCHED THEN UPDATE SET durable_seq = i.durable_seq
WHEN NOT MATCHED THEN INSERT VALUES (i.stream, i.durable_seq)
