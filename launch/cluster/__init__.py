"""Several machines: Ray on each of them, the plan, and what places the expert hosts."""
