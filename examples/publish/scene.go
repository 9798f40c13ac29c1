package main

import (
	"image"
	"image/color"
	"math"
)

// drawScene returns the program's own picture: the sun going down behind hills and
// firs, over a lake.
func drawScene(width, height int) *image.RGBA {
	pic := image.NewRGBA(image.Rect(0, 0, width, height))
	sc := newScene(float64(width) / float64(height))
	eachRow(height, func(y int) {
		for x := range width {
			var sum rgb
			for _, d := range [4][2]float64{{.25, .25}, {.75, .25}, {.25, .75}, {.75, .75}} { // smooth edges
				sum = sum.add(sc.at((float64(x)+d[0])/float64(height), (float64(y)+d[1])/float64(height)))
			}
			pic.SetRGBA(x, y, color.RGBA{uint8(sum.r / 4), uint8(sum.g / 4), uint8(sum.b / 4), 255})
		}
	})
	return pic
}

// rgb is a colour, each channel from 0 to 255.
type rgb struct{ r, g, b float64 }

func (c rgb) add(d rgb) rgb { return rgb{c.r + d.r, c.g + d.g, c.b + d.b} }

// mix goes from c at t = 0 to d at t = 1.
func (c rgb) mix(d rgb, t float64) rgb {
	t = min(max(t, 0), 1)
	return rgb{c.r + (d.r-c.r)*t, c.g + (d.g-c.g)*t, c.b + (d.b-c.b)*t}
}

const shore = 0.66 // where the lake begins, from the top

// A scene has the outlines of the hills and the wood: from the left to the
// right, how far below the top each begins. The picture is 1 high.
type scene struct {
	outline [4][]float64
}

const (
	fine   = 4096 // points of an outline, for each height of the picture
	margin = 0.1  // outlines go on past both edges, for the reflection
)

func newScene(width float64) *scene {
	sc := new(scene)
	for i := range int((width + 2*margin) * fine) {
		x := float64(i)/fine - margin
		for k, h := range hills {
			sc.outline[k] = append(sc.outline[k], h.crest(x))
		}
		sc.outline[len(hills)] = append(sc.outline[len(hills)], firs(x))
	}
	return sc
}

// at is the colour at a point.
func (sc *scene) at(x, y float64) rgb {
	if y < shore {
		return sc.land(x, y)
	}
	// The lake shows what is above it, drawn out and broken by ripples.
	depth := y - shore
	ripple := math.Sin(260*math.Pow(depth+0.02, 0.7)+4*math.Sin(9*x)) * (0.003 + 0.05*depth)
	c := sc.land(x+ripple, shore-depth*1.5-math.Abs(ripple))
	return c.mix(rgb{36, 58, 96}, 0.25+0.6*depth)
}

// land is everything above the lake.
func (sc *scene) land(x, y float64) rgb {
	at := min(max(int((x+margin)*fine), 0), len(sc.outline[0])-1)
	if y > sc.outline[len(hills)][at] {
		return rgb{22, 30, 36}.mix(rgb{38, 50, 50}, (y-0.5)*4)
	}
	for k := len(hills) - 1; k >= 0; k-- { // the nearest first
		if h := hills[k]; y > sc.outline[k][at] {
			return h.colour.mix(h.foot, (y-sc.outline[k][at])/(shore-h.top+0.05))
		}
	}
	return sky(x, y)
}

func sky(x, y float64) rgb {
	const sunX, sunY, sunR = 0.535, 0.345, 0.075
	c := rgb{44, 62, 118}.mix(rgb{250, 190, 130}, y/shore*1.15)
	d := math.Hypot(x-sunX, y-sunY)
	c = c.mix(rgb{255, 236, 170}, 0.8*math.Exp(-6*max(d-sunR, 0)))
	if d < sunR {
		c = rgb{255, 246, 214}
	}
	for _, s := range stars {
		if math.Hypot(x-s.x, y-s.y) < s.r {
			c = rgb{255, 250, 230}
		}
	}
	for _, b := range clouds {
		middle := b.y + 0.008*math.Sin(3*b.waves*x)
		thick := b.thick * (1 - math.Pow((x-b.x)*3.2, 2)) * (1 + 0.35*math.Sin(9*b.waves*x))
		if math.Abs(y-middle) < thick {
			c = c.mix(rgb{255, 214, 190}, 0.55)
		}
	}
	return c
}

var stars = [...]struct{ x, y, r float64 }{
	{.16, .09, .0022}, {.38, .10, .0017}, {.47, .05, .0020}, {.70, .13, .0015}, {1.08, .06, .0021}, {1.21, .17, .0017}, {.08, .21, .0015},
}

var clouds = [...]struct{ x, y, thick, waves float64 }{
	{.55, .20, .013, 5}, {.10, .29, .009, 7}, {1.1, .25, .010, 6},
}

// A hill is a crest of a few waves, in the colour of its distance.
type hill struct {
	top, rough, waves, from float64
	colour, foot            rgb
}

// hills, the farthest first.
var hills = [...]hill{
	{.38, .075, 4.3, 0.4, rgb{138, 112, 140}, rgb{214, 160, 140}},
	{.47, .055, 5.9, 2.1, rgb{98, 84, 120}, rgb{164, 124, 132}},
	{.55, .035, 8.3, 4.0, rgb{62, 58, 92}, rgb{110, 90, 112}},
}

func (h hill) crest(x float64) float64 {
	w := h.waves * x
	return h.top + h.rough*(math.Sin(w+h.from)+0.45*math.Sin(2.7*w+2*h.from)+0.16*math.Abs(math.Mod(5*w+h.from, 2)-1)+0.05*math.Sin(31*w))
}

// firs is the outline of the wood on the shore: the top of the tallest tree at
// x.
func firs(x float64) float64 {
	top := shore - 0.012 - 0.006*math.Sin(7*x)
	const apart = 0.03
	here := math.Floor((x + margin) / apart)
	for n := here - 3; n <= here+3; n++ { // no fir is wider
		size := math.Mod(n*n*0.6180339887+n*0.37+8, 1) // from 0 to 1, without a pattern
		at := n*apart - margin + 0.012*size
		tall := (0.05 + 0.10*size) * (0.35 + 0.65*math.Abs(math.Sin(at*2.6+0.5)))
		// A fir is wider the deeper below its top, in steps: its branches.
		away := math.Abs(x - at)
		branch := 1 - 0.45*math.Mod(away*170, 1)
		top = min(top, shore-tall+away*4.6*branch)
	}
	return top
}
