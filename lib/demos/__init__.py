"""Real JAX programs that test the cost model; the only place in `lib` that imports jax."""
