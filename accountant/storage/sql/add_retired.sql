INSERT INTO retired SELECT unnest($gpus), unnest($ends)
