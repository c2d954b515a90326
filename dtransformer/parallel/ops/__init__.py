"""Operations with hand-written gradients."""
