"""One model on several processes: what each of them is, and what they tell one another. It knows no model."""
