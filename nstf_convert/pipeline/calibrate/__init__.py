"""What is learnt from text before anything changes: Hessians, sensitivities, references, attention."""
