INSERT INTO pod_fact SELECT * FROM incoming
