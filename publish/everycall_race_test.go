//go:build race

package publish_test

// sample bounds the positions of an entry point that fail, of each workflow: all
// of them take minutes under the race detector.
const sample = 2
