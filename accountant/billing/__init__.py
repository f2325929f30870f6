"""Computes who pays for which GPU time.

Read in this order:

1. `charge`: what a charge is, and how GPU time becomes hours and amounts.
2. `usage_pricing`: asks a moment for usage and prices it. An answer about cost (`/v1/cost`, Explore) ends here.
3. `cost_allocation`: moves idle and shared time to who pays for it, by the policy of the price book. A statement needs
   this too.
4. `statements`: the lines and totals of a month.
5. `displayed_amounts`: the one rounding of amounts that people see.

The prices themselves are `accountant.prices`; closing a month, with the hash of its
statement, is `accountant.bookkeeping.month_closing`."""
