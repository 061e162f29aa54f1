"""Parts of the engine. A regular package: `import engine` in benchmarks/ must not find the script of that name."""
