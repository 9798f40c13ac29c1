// Package outside reaches out of the bubbles of testing/synctest. What is made
// inside a bubble belongs to it for good: a goroutine that is started there
// lives by the bubble's clock, and a channel that is made there kills the
// program when anybody else closes it. What serves a whole process must be
// neither, and cannot know who asks for it.
//
// One goroutine, started when the program starts, makes both. It is parked
// while nobody asks, and no bubble waits for it.
package outside

var (
	work  = make(chan func(), 64)
	stock = make(chan chan struct{}, 64)
)

// Closed is a closed channel that belongs to no bubble.
var Closed <-chan struct{} = func() chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}()

func init() { go serve() }

func serve() {
	next := make(chan struct{})
	for {
		select {
		case f := <-work:
			go f()
		case stock <- next:
			next = make(chan struct{})
		}
	}
}

// Go runs f on a goroutine of its own, outside every bubble. It waits for the
// server at most, which waits for nobody, so that a cleanup may call it.
func Go(f func()) { work <- f }

// Chan makes a channel that belongs to no bubble: whoever waits for it, anybody
// may close it. It waits for the server at most.
func Chan() chan struct{} { return <-stock }
