"""What a model's constructor does, recorded without bytes and carried out for one stage."""
