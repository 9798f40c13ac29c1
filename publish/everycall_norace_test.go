//go:build !race

package publish_test

// sample is 0: every position fails.
const sample = 0
