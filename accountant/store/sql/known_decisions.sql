-- Which of these decisions there are.
SELECT id FROM decision WHERE id IN (SELECT unnest(?))
