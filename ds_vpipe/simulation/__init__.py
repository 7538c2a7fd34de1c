"""How long a schedule takes and what it holds, on paper."""
