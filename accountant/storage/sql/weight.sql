-- accountant.core.window_decay.factor of a row [start_ms, end_ms) at reference_ms. x is the row's length in half-lives
-- times ln 2.
pow(2.0::DOUBLE, -((reference_ms - end_ms) / $half_life_ms::DOUBLE)) * CASE
        WHEN x >= 0.25 THEN (1.0::DOUBLE - exp(-x)) / x
        ELSE (1.0::DOUBLE - (1.0::DOUBLE - (1.0::DOUBLE - (1.0::DOUBLE -
             (1.0::DOUBLE - (1.0::DOUBLE - (1.0::DOUBLE - (1.0::DOUBLE -
             (1.0::DOUBLE - (1.0::DOUBLE - (1.0::DOUBLE - 1.0::DOUBLE * x / 12)
             * x / 11) * x / 10) * x / 9) * x / 8) * x / 7) * x / 6) * x / 5) * x / 4) * x / 3) * x / 2)
        END
