"""Operations with a gradient of their own."""
