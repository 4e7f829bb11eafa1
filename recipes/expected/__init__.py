"""What is kept of each recipe: the paper, our verdict, results (see `recipes.shared.expected`)."""
