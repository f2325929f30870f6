INSERT INTO decision SELECT * FROM incoming i WHERE NOT EXISTS (SELECT 1 FROM decision d WHERE d.id = i.id)
