-- The counted rows in the file.
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, {cells} FROM received WHERE booked
UNION ALL
SELECT stream, seq, set_seq, start_ms, end_ms, gpu, device, payer, {cells} FROM piece
