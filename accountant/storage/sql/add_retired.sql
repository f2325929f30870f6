-- Records until when GPUs count as capacity.
INSERT INTO retired SELECT unnest($gpus), unnest($ends)
