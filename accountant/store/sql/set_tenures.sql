MERGE INTO tenure USING incoming i ON tenure.gpu = i.gpu AND tenure.node = i.node
WHEN MATCHED THEN UPDATE SET first_ms = i.first_ms, last_ms = i.last_ms
WHEN NOT MATCHED THEN INSERT VALUES (i.gpu, i.node, i.first_ms, i.last_ms)
