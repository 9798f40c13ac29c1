//go:build race

package publish_test

// sample bounds the positions of an entry point that fail, of each workflow, and
// fewer codes do: all of them take minutes under the race detector.
const sample = 1
