"""The dense methods: pure functions of a weight and the statistics of its inputs."""
