(function () {
  'use strict';
  var data = JSON.parse(document.getElementById('data').textContent);
  var root = document.documentElement, tip = document.getElementById('tip');
  root.classList.add('js');
  function all(what, within) { return [].slice.call((within || document).querySelectorAll(what)); }
  function numbers(text) { return text.split(' ').map(Number); }

  function scaled(value, unit) {
    var units = ['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'], at = 0;
    while (value >= 999.5 && at < 7) { value /= 1000; at++; }
    return Number(value.toPrecision(3)) + ' ' + units[at] + unit;
  }
  function size(bytes) { return bytes ? scaled(bytes, 'B') : '0'; }
  function seconds(s) {
    if (s >= 1) return s.toFixed(3) + ' s';
    return s >= 1e-3 ? (s * 1e3).toFixed(3) + ' ms' : (s * 1e6).toFixed(2) + ' us';
  }
  function percent(share) { return (share * 100).toFixed(share < 0.1 ? 1 : 0) + '%'; }
  function inUnit(value, unit) {
    if (!value) return '0';
    if (unit === 's') {
      var scale = value >= 1 ? [1, 's'] : value >= 1e-3 ? [1e3, 'ms'] : [1e6, 'us'];
      return Number((value * scale[0]).toPrecision(6)) + ' ' + scale[1];
    }
    if (unit === '%') return Number((value * 100).toPrecision(6)) + '%';
    for (var at = 0, units = ['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z']; value >= 1000 && at < 7; at++) {
      value /= 1000;
    }
    return Number(value.toPrecision(6)) + ' ' + units[at] + unit;
  }

  // What is under the pointer, beside it; also told by titles where there is no script.
  function show(event, words) {
    tip.textContent = words;
    tip.hidden = !words;
    var x = event.clientX + 14, y = event.clientY + 14;
    if (x + tip.offsetWidth > root.clientWidth - 4) x = Math.max(4, root.clientWidth - 4 - tip.offsetWidth);
    if (y + tip.offsetHeight > root.clientHeight - 4) y = event.clientY - 10 - tip.offsetHeight;
    tip.style.left = x + 'px';
    tip.style.top = y + 'px';
  }
  all('.chart svg title').forEach(function (title) {
    var mark = title.parentNode, words = title.textContent;
    mark.setAttribute('aria-label', words);
    mark.removeChild(title); // the browser would show it a second time
  });
  all('.chart svg').forEach(function (svg) {
    var live = svg.dataset.held || svg.dataset.matrix || svg.dataset.timeline;
    function point(event) {
      var mark = live ? null : event.target.closest('[aria-label]');
      if (!live) show(event, mark && mark !== svg ? mark.getAttribute('aria-label') : '');
    }
    svg.addEventListener('pointermove', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('pointerleave', function (event) {
      if (event.pointerType === 'mouse') tip.hidden = true; // a finger leaves where it taps
    });
  });
  document.addEventListener('pointerdown', function (event) {
    if (!event.target.closest('.chart svg')) tip.hidden = true;
  });
  window.addEventListener('scroll', function () { tip.hidden = true; }, {passive: true});

  // Tabs: a click, or the arrows, Home and End.
  all('.tabs').forEach(function (tabs) {
    var buttons = all(':scope > [role=tablist] > [role=tab]', tabs);
    function open(nth, focus) {
      buttons.forEach(function (button, at) {
        var chosen = at === nth;
        button.setAttribute('aria-selected', chosen);
        button.tabIndex = chosen ? 0 : -1;
        document.getElementById(button.getAttribute('aria-controls')).hidden = !chosen;
        if (chosen && focus) button.focus();
      });
      hints();
    }
    buttons.forEach(function (button, nth) {
      button.addEventListener('click', function () { open(nth, false); });
      button.addEventListener('keydown', function (event) {
        var count = buttons.length;
        var to = {
          ArrowRight: (nth + 1) % count, ArrowLeft: (nth + count - 1) % count,
          Home: 0, End: count - 1
        }[event.key];
        if (to !== undefined) { open(to, true); event.preventDefault(); }
      });
    });
    open(0, false);
  });

  // Pictures that are wider than the screen say so.
  function hints() {
    all('.scrolls').forEach(function (hint) {
      var box = hint.parentNode.querySelector('.natural');
      var needed = box.scrollWidth > box.clientWidth + 1;
      if (needed && !box.seen) { // the middle first, where the graph begins
        box.seen = true;
        box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2;
      }
      hint.classList.toggle('needed', needed);
    });
  }
  window.addEventListener('resize', hints);
  all('details').forEach(function (each) { each.addEventListener('toggle', hints); });
  hints();

  // Where in a picture a pointer is, in the picture's own units.
  function place(svg, event) {
    var box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return {
      x: (event.clientX - box.left) / box.width * view.width,
      y: (event.clientY - box.top) / box.height * view.height
    };
  }

  // A cursor that a pointer or keys move, and words on what is there.
  function live(svg, name, move, keys, start) {
    var out = document.getElementById('at-' + name);
    function tell(words, event) {
      out.textContent = words;
      if (event) show(event, words);
    }
    function pointed(event) { tell(move(place(svg, event)), event); }
    svg.addEventListener('pointermove', pointed);
    svg.addEventListener('pointerdown', pointed);
    svg.addEventListener('focus', function () { tell(start()); });
    svg.addEventListener('keydown', function (event) {
      var words = keys(event);
      if (words !== undefined) { tell(words); event.preventDefault(); }
    });
  }

  // Memory: what is held at a point.
  all('svg[data-held]').forEach(function (svg) {
    var name = svg.dataset.held, d = data[name], at = d.peak, count = d.task.length;
    var field = numbers(svg.dataset.field), cursor = svg.querySelector('.cursor');
    function words(nth) {
      at = Math.max(0, Math.min(count - 1, nth));
      var share = (d.x[at] + d.x[at + 1]) / 2, total = 0, parts = [];
      var x = field[0] + share * (field[1] - field[0]);
      cursor.setAttribute('d', 'M' + x.toFixed(1) + ' ' + field[2] + 'V' + field[3]);
      Object.keys(d.held).forEach(function (category) {
        var bytes = d.held[category][at];
        total += bytes;
        if (bytes) parts.push(category.replace('_', ' ') + ' ' + size(bytes));
      });
      return size(total) + ': ' + d.task[at] + ': ' + parts.join(', ');
    }
    live(svg, name, function (where) {
      var share = (where.x - field[0]) / (field[1] - field[0]), nth = 0;
      while (nth < count - 1 && d.x[nth + 1] < share) nth++;
      return words(nth);
    }, function (event) {
      var by = event.shiftKey ? 10 : 1, to = {
        ArrowLeft: at - by, ArrowRight: at + by, Home: 0, End: count - 1, p: d.peak, P: d.peak
      }[event.key];
      return to === undefined ? undefined : words(to);
    }, function () { return words(at); });
  });

  // The matrix: who sends how much to whom at a square.
  all('svg[data-matrix]').forEach(function (svg) {
    var name = svg.dataset.matrix, d = data[name], count = d.bytes.length, row = 0, column = 0;
    var field = numbers(svg.dataset.field), cursor = svg.querySelector('.cursor');
    var cell = field[2] / count;
    function ranks(nth) {
      var first = d.edges[nth], last = d.edges[nth + 1] - 1;
      return first === last ? 'rank ' + first : 'ranks ' + first + '-' + last;
    }
    function words(y, x) {
      row = Math.max(0, Math.min(count - 1, y));
      column = Math.max(0, Math.min(count - 1, x));
      cursor.setAttribute('d', 'M' + (field[0] + column * cell) + ' ' + (field[1] + row * cell) +
        'h' + cell + 'v' + cell + 'h' + -cell + 'z');
      var bytes = d.bytes[row][column];
      return ranks(row) + (d.edges[row + 1] - d.edges[row] > 1 ? ' send ' : ' sends ') +
        (row === column ? (d.edges[1] > 1 ? 'each other ' : 'itself ') : ranks(column) + ' ') +
        (bytes ? size(bytes) : 'nothing');
    }
    live(svg, name, function (where) {
      return words(Math.floor((where.y - field[1]) / cell), Math.floor((where.x - field[0]) / cell));
    }, function (event) {
      var move = {
        ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]
      }[event.key];
      return move ? words(row + move[0], column + move[1]) : undefined;
    }, function () { return words(row, column); });
  });

  // The timeline: how busy each strip of a lane is, in columns finer than those that are drawn.
  var line = data.timeline;
  if (line) {
    line.lanes.forEach(function (lane) {
      lane.shares = lane.shares.map(function (text) {
        var plain = text.replace(/(.)\((\d+)\)/g, function (run, c, n) { return c.repeat(+n); });
        return Float32Array.from(plain, function (c) {
          return line.levels.indexOf(c) / (line.levels.length - 1);
        });
      });
    });
  }
  function mean(shares, low, high) {
    var first = Math.floor(low), last = Math.max(first + 1, Math.ceil(high)), sum = 0;
    for (var nth = first; nth < last; nth++) sum += shares[Math.min(nth, shares.length - 1)];
    return sum / (last - first);
  }
  function drawTimeline(svg, view, scale) {
    var wide = scale[1] - scale[0];
    all('[data-strip]', svg).forEach(function (path) {
      var of = numbers(path.dataset.strip), lane = line.lanes[of[0]];
      var low = view[0] * line.columns, span = (view[1] - view[0]) * line.columns;
      var count = Math.min(Math.floor(wide / 1.5), Math.max(1, Math.round(span))), parts = [];
      for (var nth = 0; nth < count; nth++) {
        var from = low + span * nth / count, to = low + span * (nth + 1) / count, base = 0;
        if (of[1] < lane.kernels) {
          for (var below = 0; below < of[1]; below++) base += mean(lane.shares[below], from, to);
        }
        var high = mean(lane.shares[of[1]], from, to) * of[3];
        if (!high) continue;
        high = Math.max(high, of[1] < lane.kernels ? 0.5 : 3);
        var x = scale[0] + wide * nth / count, w = (wide / count).toFixed(2);
        parts.push('M' + x.toFixed(2) + ' ' + (of[2] - base * of[3] - high).toFixed(1) + 'h' + w +
          'v' + high.toFixed(1) + 'h-' + w + 'z');
      }
      path.setAttribute('d', parts.join(''));
    });
  }
  function drawBars(svg, view, scale) {
    var wide = scale[1] - scale[0], by = 1 / (view[1] - view[0]);
    function to(x) { return scale[0] + ((x - scale[0]) / wide - view[0]) * by * wide; }
    all('.marks rect', svg).forEach(function (rect) {
      if (!rect.whole) rect.whole = [+rect.getAttribute('x'), +rect.getAttribute('width')];
      var low = Math.max(scale[0], to(rect.whole[0]));
      var high = Math.min(scale[1], to(rect.whole[0] + rect.whole[1]));
      rect.setAttribute('x', Number(low.toFixed(1)));
      rect.setAttribute('width', Number(Math.max(0, high - low).toFixed(1)));
    });
    // A label stays in what is seen of its part, if there is room.
    all('.labels', svg).forEach(function (group) {
      var parts = all('rect', group.previousElementSibling);
      all('[data-x]', group).forEach(function (label) {
        var x = +label.dataset.x, part = parts.filter(function (each) {
          return each.whole[0] <= x && x <= each.whole[0] + each.whole[1];
        })[0];
        var low = +part.getAttribute('x'), width = +part.getAttribute('width');
        label.setAttribute('transform', 'translate(' + (low + width / 2 - x).toFixed(1) + ' 0)');
        label.style.display = width < label.textContent.length * 8 + 8 ? 'none' : '';
        if (by === 1) {
          label.removeAttribute('transform');
          label.style.display = '';
        }
      });
    });
    all('.limit', svg).forEach(function (group) {
      group.style.display = by > 1 ? 'none' : '';
    });
  }
  function drawAxis(svg, view, scale, unit) {
    var most = scale[2], low = view[0] * most, high = view[1] * most, wide = scale[1] - scale[0];
    var axis = svg.querySelector('.ticks'), y = +axis.dataset.y;
    var about = Math.max(2, Math.floor(wide / 75));
    var power = Math.pow(10, Math.floor(Math.log10((high - low) / about))), step = power * 10;
    [5, 2, 1].forEach(function (n) { if ((high - low) / (power * n) <= about) step = power * n; });
    var ns = svg.namespaceURI, path = document.createElementNS(ns, 'path');
    var d = 'M' + scale[0] + ' ' + y + 'H' + scale[1];
    if (!axis.whole) axis.whole = axis.innerHTML;
    if (view[0] === 0 && view[1] === 1) { axis.innerHTML = axis.whole; return; }
    axis.textContent = '';
    for (var value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) {
      var x = scale[0] + (value - low) / (high - low) * wide;
      var text = document.createElementNS(ns, 'text');
      d += 'M' + x.toFixed(1) + ' ' + y + 'v4';
      text.textContent = inUnit(Number(value.toPrecision(9)), unit);
      x = Math.min(x, scale[1] + 10 - text.textContent.length * 3.8);
      text.setAttribute('x', x.toFixed(1));
      text.setAttribute('y', y + 17);
      text.setAttribute('text-anchor', 'middle');
      axis.appendChild(text);
    }
    path.setAttribute('d', d);
    path.setAttribute('fill', 'none');
    path.setAttribute('stroke', 'currentColor');
    axis.appendChild(path);
  }

  // Zoom: a drag across, buttons, or + and - and 0 and the arrows.
  all('figure[data-zooms]').forEach(function (figure) {
    var view = [0, 1], pictures = all('svg[data-across]', figure);
    var tools = document.createElement('div'), buttons = {};
    tools.className = 'tools';
    function button(name, label, action) {
      var made = buttons[name] = document.createElement('button');
      made.type = 'button';
      made.textContent = label;
      made.setAttribute('aria-label', name);
      made.addEventListener('click', action);
      tools.appendChild(made);
    }
    function set(low, high) {
      var span = Math.min(1, Math.max(high - low, 1e-3));
      low = Math.max(0, Math.min(1 - span, low));
      view = [low, low + span];
      if (span === 1) view = [0, 1];
      pictures.forEach(function (svg) {
        var scale = numbers(svg.dataset.across);
        (svg.dataset.timeline ? drawTimeline : drawBars)(svg, view, scale);
        drawAxis(svg, view, scale, svg.dataset.unit);
        var cursor = svg.querySelector('.cursor');
        if (cursor) cursor.setAttribute('d', '');
      });
      buttons['Zoom out'].disabled = buttons['Show all'].disabled = span === 1;
    }
    function by(factor) {
      var middle = (view[0] + view[1]) / 2, half = (view[1] - view[0]) * factor / 2;
      set(middle - half, middle + half);
    }
    function along(share) {
      var span = view[1] - view[0];
      set(view[0] + share * span, view[1] + share * span);
    }
    button('Zoom in', '+', function () { by(0.5); });
    button('Zoom out', '\u2212', function () { by(2); });
    button('Show all', 'Show all', function () { set(0, 1); });
    tools.appendChild(document.createTextNode('Drag across the chart to zoom in.'));
    figure.insertBefore(tools, figure.firstChild);
    figure.view = function () { return view; };
    pictures.forEach(function (svg) {
      var scale = numbers(svg.dataset.across), from = null, brush = null;
      if (svg.dataset.timeline) timeline(svg, figure, scale, along);
      svg.addEventListener('keydown', function (event) {
        var action = {
          '+': function () { by(0.5); }, '=': function () { by(0.5); }, '-': function () { by(2); },
          '0': function () { set(0, 1); }
        }[event.key];
        if (action) { action(); event.preventDefault(); }
      });
      function within(x) { return Math.max(scale[0], Math.min(scale[1], x)); }
      svg.addEventListener('pointerdown', function (event) {
        if (event.button === 0) from = within(place(svg, event).x);
      });
      svg.addEventListener('pointermove', function (event) {
        if (from === null) return;
        var to = within(place(svg, event).x), view = svg.viewBox.baseVal;
        if (!brush && Math.abs(to - from) > 4) {
          brush = document.createElementNS(svg.namespaceURI, 'rect');
          brush.setAttribute('class', 'brush');
          brush.setAttribute('pointer-events', 'none');
          brush.setAttribute('y', 0);
          brush.setAttribute('height', view.height);
          svg.appendChild(brush);
          svg.setPointerCapture(event.pointerId);
        }
        if (brush) {
          brush.setAttribute('x', Math.min(from, to));
          brush.setAttribute('width', Math.abs(to - from));
        }
      });
      function done(event, keep) {
        if (brush) {
          var ends = [from, within(place(svg, event).x)].sort(function (a, b) { return a - b; });
          var wide = scale[1] - scale[0], span = view[1] - view[0], low = view[0];
          svg.removeChild(brush);
          if (keep && ends[1] - ends[0] > 4) {
            set(low + (ends[0] - scale[0]) / wide * span, low + (ends[1] - scale[0]) / wide * span);
          }
        }
        from = brush = null;
      }
      svg.addEventListener('pointerup', function (event) { done(event, true); });
      svg.addEventListener('pointercancel', function (event) { done(event, false); });
      svg.addEventListener('dblclick', function () { set(0, 1); });
    });
    buttons['Zoom out'].disabled = buttons['Show all'].disabled = true;
  });

  // A cursor over the timeline: the time, and how busy the strips of the lane are there.
  function timeline(svg, figure, scale, along) {
    var cursor = svg.querySelector('.cursor'), at = 0, lane = 0;
    var rows = line.lanes.map(function (each, nth) {
      var places = all('[data-strip]', svg).map(function (path) { return numbers(path.dataset.strip); })
        .filter(function (of) { return of[0] === nth; });
      return {
        top: Math.min.apply(null, places.map(function (of) { return of[2] - of[3]; })),
        bottom: Math.max.apply(null, places.map(function (of) { return of[2]; }))
      };
    });
    function words() {
      var view = figure.view(), column = view[1] - view[0];
      column *= line.columns / Math.max(1, (scale[1] - scale[0]) / 2);
      var from = at * line.columns, of = line.lanes[lane], parts = [];
      var x = scale[0] + (at - view[0]) / (view[1] - view[0]) * (scale[1] - scale[0]);
      cursor.setAttribute('d', 'M' + x.toFixed(1) + ' ' + rows[lane].top + 'V' + rows[lane].bottom);
      of.strips.forEach(function (name, nth) {
        var share = mean(of.shares[nth], Math.min(from, line.columns - 1), from + column);
        if (share) parts.push(name + ' ' + percent(share));
      });
      return of.name + ' at ' + seconds(at * scale[2]) + ': ' + (parts.join(', ') || 'idle');
    }
    live(svg, 'timeline', function (where) {
      var view = figure.view(), share = (where.x - scale[0]) / (scale[1] - scale[0]);
      at = Math.max(0, Math.min(1, view[0] + share * (view[1] - view[0])));
      lane = 0;
      rows.forEach(function (row, nth) { if (where.y >= row.top - 6) lane = nth; });
      return words();
    }, function (event) {
      var view = figure.view(), step = (view[1] - view[0]) / (event.shiftKey ? 10 : 100);
      var move = {
        ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: 1
      }[event.key];
      if (event.key === 'ArrowUp') lane = Math.max(0, lane - 1);
      else if (event.key === 'ArrowDown') lane = Math.min(rows.length - 1, lane + 1);
      else if (move === undefined) return undefined;
      else at = Math.max(0, Math.min(1, move));
      if (at < view[0]) along((at - view[0]) / (view[1] - view[0]) - 0.5);
      if (at > view[1]) along((at - view[1]) / (view[1] - view[0]) + 0.5);
      return words();
    }, words);
  }

  // The command, into the clipboard.
  all('pre.command').forEach(function (pre) {
    var made = document.createElement('button'), code = pre.querySelector('code');
    made.type = 'button';
    made.className = 'copy';
    made.textContent = 'Copy';
    made.addEventListener('click', function () {
      function said(done) { made.textContent = done ? 'Copied' : 'Press Ctrl+C'; }
      function choose() { // where pages from files have no clipboard
        getSelection().selectAllChildren(code);
        said(document.execCommand && document.execCommand('copy'));
      }
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(said.bind(null, true), choose);
      else choose();
      setTimeout(function () { made.textContent = 'Copy'; }, 2000);
    });
    pre.appendChild(made);
  });

  // Paper has no closed details.
  var closed = [];
  window.addEventListener('beforeprint', function () {
    closed = all('details[data-print]:not([open])');
    closed.forEach(function (each) { each.open = true; });
  });
  window.addEventListener('afterprint', function () {
    closed.forEach(function (each) { each.open = false; });
  });
})();
