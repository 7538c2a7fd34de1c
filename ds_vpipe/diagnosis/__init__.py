"""What keeps training from starting: facts about machines, and pure checks that make findings of them."""
