INSERT INTO pod_label SELECT * FROM incoming
