-- Rows with what weight.sql wants to know of them.
SELECT *, start_ms - start_ms % 900000 + 900000 AS reference_ms,
       (end_ms - start_ms) / $half_life_ms::DOUBLE * 0.6931471805599453::DOUBLE AS x
FROM entry
