"""What torch does not say in public: guards, private names, precision, sizes, memory, threads. No attention in it."""
